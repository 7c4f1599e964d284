"""What discovery reads of a Kubernetes API server.

`environment` finds it, by the Pod's account or a `kubeconfig`. `api` lists and watches, `mirror`
keeps what was seen, `engines` names the engines among it.
"""
