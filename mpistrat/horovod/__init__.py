"""Support for Horovod programs: `import horovod`, Horovod's module paths, and horovod.run."""
