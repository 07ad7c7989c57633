"""The command `mpistrat`. Nothing here imports TensorFlow; each subcommand is a module that `main` loads when asked."""
