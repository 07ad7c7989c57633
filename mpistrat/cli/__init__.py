"""The command `mpistrat`. `main` imports the module of a subcommand when it runs. No subcommand imports Keras."""
