"""Hosts on slow links, emulated on one machine."""
