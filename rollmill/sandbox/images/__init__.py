"""Images: where a box's root file system comes from. `ImageStore` keeps them, `build` and `import_archive` make them."""

from __future__ import annotations

from rollmill.sandbox.images.oci import import_archive
from rollmill.sandbox.images.store import Image, ImageStore

__all__ = ["Image", "ImageStore", "import_archive"]
