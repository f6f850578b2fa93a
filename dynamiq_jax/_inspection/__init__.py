"""Inspection of train steps: what a compiled program sends, and what that says about mistakes."""
