"""The functions that the YAML files name. The harness loads this file by its path, so its imports are absolute."""

from axolotl_supertune.tasks.perplexity import load_perplexity, pooled_perplexity, score_perplexity
from axolotl_supertune.tasks.scoring import extract, load, prompt, score, total

__all__ = ["extract", "load", "load_perplexity", "pooled_perplexity", "prompt", "score", "score_perplexity", "total"]
