"""The command `mpistrat`. `main` imports the module of the subcommand that runs. No subcommand imports Keras."""
