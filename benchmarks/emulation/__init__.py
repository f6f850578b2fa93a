"""Hosts on slow links, emulated on one machine (Linux, root, iproute2).

__main__          all-reduces over such hosts: `python -m benchmarks.emulation`
command           its options and tables
network           measurement of several settings between emulated hosts
measuring_host    process of one host of it
host              process of an emulated host, which answers requests
hosts             one process for each emulated host, joined to the others
namespaces        network namespaces on a bridge, with limited links
processes         processes that are started, asked, watched and ended together
python_processes  their command line and environment
"""
