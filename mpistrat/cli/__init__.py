"""The command `mpistrat`. `main` imports a subcommand when it runs it. None imports Keras."""
