"""The command `mpistrat`. `main` imports a subcommand when it runs it. Only `bench --train` imports Keras."""
