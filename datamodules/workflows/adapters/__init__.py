"""Environments, tools and machines that exist elsewhere, each through the library of its own, an optional extra. Class
paths name the file, so that one is imported without the others' libraries."""
