"""One-sided RDMA over pyverbs, which is optional: importing this package imports none of it."""
