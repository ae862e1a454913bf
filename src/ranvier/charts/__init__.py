"""What charts are drawn with; the charts themselves stand where their numbers come from."""
