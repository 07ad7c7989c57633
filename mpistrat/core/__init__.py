"""The vocabulary of all packages: settings, errors, topology, requests, handles, memory."""
