"""Starts mlx-lm's own server at its best: `python -m deploy.bench.mlx_lm_server --model FOLDER --port N`.

On Linux its MLX links a slow BLAS unless OpenBLAS is loaded first, which Paceline does for itself; a fair bench does
it for the peer too, with Paceline's own loader. Nothing else of mlx-lm is touched.
"""

from backends.mlx.runtime import load_blas


def main() -> None:
    """Hand the command line on to mlx-lm."""
    load_blas()
    from mlx_lm import server

    server.main()


if __name__ == "__main__":
    main()
