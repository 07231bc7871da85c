"""The Streamlit script: page settings and navigation. `poolmeter dashboard` runs it."""

from pathlib import Path

import streamlit as st

from poolmeter.dashboards import bill, now

# A file of our own: Streamlit's named icons and emoji are fetched from the network when they are the page's icon.
ICON = Path(__file__).with_name("icon.svg")
# Streamlit leaves a hand's breadth free above the title; on a laptop that is a row of cards.
STYLE = "<style>.stMainBlockContainer { padding-top: 3.75rem; padding-bottom: 2rem; }</style>"


def main() -> None:
    """Draw the chosen page."""
    st.set_page_config(page_title="poolmeter", page_icon=str(ICON), layout="wide")
    st.html(STYLE)
    pages = [
        st.Page(now.show, title="Pool now", icon=":material/speed:", default=True),
        st.Page(bill.show, title="Chargeback", icon=":material/receipt_long:", url_path="chargeback"),
    ]
    st.navigation(pages, position="top").run()


main()
