"""The training loop, the session it runs in, and the supervisor that forms world after world."""
