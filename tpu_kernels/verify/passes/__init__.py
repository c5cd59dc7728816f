"""The passes of `check`, one module each; every pass returns rows and never raises."""
