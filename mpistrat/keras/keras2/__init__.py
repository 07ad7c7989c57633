"""What mpistrat needs of Keras 2 (tf_keras), which is imported with the first module or optimizer of it."""
