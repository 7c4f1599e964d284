"""Engines of a Kubernetes cluster: Ready Pods with a label, or the endpoints of a Service.

`source` lists and watches them through `api`; `mirror` keeps what was seen, `engines` names the
engines among it.
"""
