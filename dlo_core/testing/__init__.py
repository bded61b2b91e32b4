"""The testing kit: simulated ranks, forked ranks, and a conformance suite for backends."""
