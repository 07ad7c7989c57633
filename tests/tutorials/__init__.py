"""What TensorFlow's three tutorials on distributed training do, with MPIStrategy in the strategy's place."""
