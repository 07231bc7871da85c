"""Price plans: a TOML file to a checked, frozen `PricePlan`; docs/reference/price-plan.md is its reference."""

from poolmeter.accounting.plans.bands import Band
from poolmeter.accounting.plans.file import demo_plan, load_plan, parse_plan
from poolmeter.accounting.plans.plan import PRICE_DECIMALS, PricePlan, PriceSet

__all__ = ["PRICE_DECIMALS", "Band", "PricePlan", "PriceSet", "demo_plan", "load_plan", "parse_plan"]
