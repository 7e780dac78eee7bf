"""Who may do what: Roles and RoleBindings, as Kubernetes reads them."""

from typing import NamedTuple

from tests.k8s.api_requests import Request
from tests.k8s.api_store import BINDINGS, ROLES, Object, Resource, Store


class Account(NamedTuple):
    """A ServiceAccount."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}"


def allowed(store: Store, account: Account, verb: str, request: Request) -> bool:
    """Whether a Role that is bound to the account in the request's namespace allows it."""
    namespace = request.namespace
    for binding in store.all(BINDINGS, namespace) if namespace else ():
        if any(_is(subject, account, namespace) for subject in binding["subjects"]):
            role = store.find(ROLES, namespace, binding["roleRef"]["name"])
            if role and any(permits(rule, verb, request.resource, request.name) for rule in role["rules"] or ()):
                return True
    return False


def permits(rule: Object, verb: str, resource: Resource, name: str = "") -> bool:
    """Whether one rule of a Role allows it."""
    return (
        bool({resource.group, "*"} & {*rule["apiGroups"]})
        and bool({resource.plural, "*"} & {*rule["resources"]})
        and bool({verb, "*"} & {*rule["verbs"]})
        and ("resourceNames" not in rule or name in rule["resourceNames"])
    )


def _is(subject: Object, account: Account, namespace: str) -> bool:
    place = subject.get("namespace", namespace)
    return (subject["kind"], place, subject["name"]) == ("ServiceAccount", *account)
