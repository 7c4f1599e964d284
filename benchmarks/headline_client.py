"""vLLM's own `vllm bench serve`: its command does not start in the CPU package.

headline_client.py FLAGS OF vllm bench serve...   (run by the vLLM environment's python)
"""

import argparse

from vllm.benchmarks import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
