"""Names that the YAML files call; everything is in the package, which the harness may load several times for free."""

from ..perplexity import load_perplexity, pooled_perplexity, score_perplexity
from ..scoring import extract, load, prompt, score, total

__all__ = ["extract", "load", "load_perplexity", "pooled_perplexity", "prompt", "score", "score_perplexity", "total"]
