"""States that outlive their box: layers as portable blobs, manifests that name them, and logs of commands that replay."""
