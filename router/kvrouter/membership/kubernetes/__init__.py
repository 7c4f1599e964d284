"""What discovery reads of a Kubernetes API server.

`api` lists and watches, `mirror` keeps what was seen, `engines` names the engines among it.
"""
