"""Pages of measurements: one HTML file without anything to load, with charts as inline SVG."""
