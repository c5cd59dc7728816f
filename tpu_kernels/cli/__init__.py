"""The command line ``tpu-kernels``: one module per subcommand, argparse, tables or JSON."""
