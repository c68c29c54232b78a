"""The report of a run: report.json, report.html, the console's table."""
