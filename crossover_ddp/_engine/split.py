"""Plain averaging of a bucket."""

from .buckets import Bucket
from .links import Link


async def split(bucket: Bucket, link: Link) -> None:
    """Average over the ranks; nothing happens between the halves."""
    await link.all_reduce(bucket.flat, bucket.layout)
