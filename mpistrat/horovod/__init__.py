"""For programs of Horovod: `import horovod`, Horovod's module paths, and horovod.run."""
