"""What installs and measures Paceline: service templates, their renderer, and benchmarks against peers.

Run from the root of the repository: `python -m deploy.render ...` and `python -m deploy.bench ...`. Nothing
here is imported by the daemon; `api.units` reads the templates as data.
"""
