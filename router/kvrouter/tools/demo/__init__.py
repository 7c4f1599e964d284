"""The demo: store, engines and router on one machine, a workload, a killed engine, and figures."""
