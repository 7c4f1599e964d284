"""The right answer of every simulated engine to a prompt, computed without an engine. Pure.

It shares only the functions from names to bytes and from bytes to tokens with the engines: no
cache, store or router can change this answer.
"""

from array import array

from kvrouter.tools.sim.kv_bytes import KVContext, kv_of_block
from kvrouter.tools.sim.tokenizer import SimTokenizer
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import hash_tokens


class Oracle:
    """The answers of every engine with this manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self._spec = manifest.spec
        self._block_bytes = manifest.block_bytes
        self._root = bytes.fromhex(manifest.spec.root)
        self.tokenizer = SimTokenizer()

    def text(self, prompt: list[int], answer_tokens: int) -> str:
        """The text of the answer to a prompt of token ids, without a cache salt."""
        tokens = list(prompt)
        context = KVContext(self._spec.digest)
        for _ in range(answer_tokens):
            self._attend(context, tokens)
            tail = tokens[context.blocks * self._spec.block_tokens :]
            tokens.append(self.tokenizer.syllable(context.next_number(tail)))
        return self.tokenizer.decode(tokens[len(prompt) :])

    def _attend(self, context: KVContext, tokens: list[int]) -> None:
        size = self._spec.block_tokens
        if len(tokens) // size == context.blocks:
            return
        names = hash_tokens(array("I", tokens), size, root=self._root)
        for name in names[context.blocks :]:
            context.add_block(kv_of_block(self._spec.digest, name, self._block_bytes))
