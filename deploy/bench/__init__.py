"""Benchmarks of a running server over real sockets: `python -m deploy.bench --help`.

Speed is claimed as a ratio from one run: both sides live at the same time and take turns. Servers are
child processes, spoken to as any client would: the bench's own process never imports MLX.
"""
