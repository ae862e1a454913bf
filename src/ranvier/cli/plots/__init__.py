"""Pictures of measurements, drawn with a small canvas of our own: as SVG always, as PNG where Pillow is installed."""
