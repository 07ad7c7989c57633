"""What all packages share: settings, errors, topology, requests, handles, memory, tuning constants."""
