"""The command `mpistrat`. `main` imports a subcommand only to run it. No subcommand imports Keras."""
