"""Control messages, votes and collectives in memory that the ranks of one host share."""
