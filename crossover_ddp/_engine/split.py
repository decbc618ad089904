"""Plain averaging of a bucket."""

from .buckets import Bucket
from .links import Link


async def split(bucket: Bucket, link: Link) -> None:
    """Average over the ranks by a reduce-scatter and an all-gather."""
    await link.all_reduce(bucket.flat, bucket.layout)
