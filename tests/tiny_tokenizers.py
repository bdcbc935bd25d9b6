"""Real fast tokenizers of both common kinds, trained on a few lines in milliseconds."""

from __future__ import annotations

import string
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Let a = 17 and b = a + 24. Then b is 41, so the answer is 41.\n",
    "The red box is under the table. Where is the box? It is under the table!\n",
    "Step 1: add the numbers.\n\nStep 2: check the result against the first line.\n",
] * 3
METASPACE_KINDS = ("first", "always", "normalizer")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ bos_token }}<{{ message.role }}>{{ message.content | trim }}</{{ message.role }}>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def byte_level(*, bos: bool = True, trim_offsets: bool = False, digits: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (the kind of GPT-2, Llama 3, Qwen and SmolLM2)."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=["<s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    steps_after = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        steps_after.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]))
    tokenizer.post_processor = processors.Sequence(steps_after)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template=CHAT_TEMPLATE)


@cache
def metaspace(kind: str, *, bos: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer that writes spaces as `▁` and puts one in front of a text (the kind of Llama 2 and T5)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    scheme = "first" if kind == "normalizer" else kind
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=240, special_tokens=["<s>", "<unk>"], initial_alphabet=[*string.printable, "▁"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )
