"""Parts of a graph on another machine, over gRPC."""
