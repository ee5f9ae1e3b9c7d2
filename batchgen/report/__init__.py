"""A finished job as one page: figures.py (what is counted), charts.py (what is drawn), page.py (HTML)."""
