"""mpistrat's support of Keras 2 (tf_keras), imported with the first module or optimizer of Keras 2."""
