from kvrouter.admission.queue import Accounts


def test_a_tenant_that_comes_begins_where_the_others_are() -> None:
    accounts = Accounts()
    accounts.open("a", [])
    for _ in range(10):
        accounts.charge("a", 800)
    accounts.open("new", ["a"])
    assert accounts.spent["new"] == 9 * 800 + 100 < accounts.spent["a"] == 8000


def test_a_tenant_that_pauses_owes_as_much_as_before() -> None:
    accounts = Accounts()
    accounts.open("heavy", [])
    accounts.open("light", ["heavy"])
    accounts.charge("heavy", 32_000)
    accounts.charge("light", 200)
    accounts.open("heavy", ["light"])
    assert accounts.spent == {"heavy": 32_000, "light": 200}


def test_what_was_expected_too_high_or_too_low_is_put_right_once_it_is_known() -> None:
    accounts = Accounts()
    accounts.open("a", [])
    accounts.charge("a", 300)
    accounts.correct("a", -200, accounts.era)
    accounts.correct("a", 50, accounts.era)
    accounts.correct("of a time before", 50, accounts.era)
    assert accounts.spent == {"a": 150}


def test_what_was_charged_before_accounts_were_forgotten_is_not_put_right_after_it() -> None:
    accounts = Accounts()
    accounts.open("a", [])
    accounts.charge("a", 300)
    era = accounts.era
    accounts.close()
    accounts.open("a", [])
    accounts.correct("a", 1700, era)
    assert accounts.spent == {"a": 0}


def test_tenants_that_are_gone_do_not_add_up() -> None:
    accounts = Accounts()
    accounts.open("stays", [])
    accounts.charge("stays", 10**9)
    for number in range(20_000):
        accounts.open(str(number), ["stays"])
        accounts.charge(str(number), 100)
        assert len(accounts.spent) < 5000
    assert accounts.spent["stays"] == 10**9
