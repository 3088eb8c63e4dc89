"""What a known history was compacted to: digests, recipes, and the ledger that finds them again.

In: the caller's messages. Out: a recipe, found by content and applied to the caller's own messages
of this call. The manager asks; nothing here counts or decides.
"""

from ctxguard.history.digests import Digester, digest, text_digest
from ctxguard.history.ledger import Known, Ledger
from ctxguard.history.recipe import UNTOUCHED, Edit, Insert, Recipe

__all__ = ["UNTOUCHED", "Digester", "Edit", "Insert", "Known", "Ledger", "Recipe", "digest", "text_digest"]
