"""The members of vLLM's own request classes; run by the vLLM environment. Prints a JSON object."""

import json

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

if __name__ == "__main__":
    found = {
        "completion": list(CompletionRequest.model_fields),
        "chat": list(ChatCompletionRequest.model_fields),
    }
    print(json.dumps(found))
