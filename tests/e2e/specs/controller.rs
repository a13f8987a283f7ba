//! Reads the controllers' metrics, and changes their number and their config.

use anyhow::{Context as _, Result};

use crate::fixture::Fixture;

/// The namespace of Culvert's workloads.
const NAMESPACE: &str = "kube-system";
const DEPLOYMENT: &str = "deployment/culvert-controller";
/// The number of controllers in the manifests.
pub(super) const REPLICAS: u32 = 2;

/// Returns the number of requests that the running controllers have denied.
pub(super) fn denied_requests(fixture: &Fixture<'_>) -> Result<u64> {
    let path = "jsonpath={.items[*].metadata.name}";
    let label = "app.kubernetes.io/name=culvert-controller";
    let arguments = ["-n", NAMESPACE, "get", "pods", "-l", label, "-o", path];
    let pods = fixture.kubectl().run(&arguments)?;
    let mut total = 0;
    for pod in pods.split_whitespace() {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}:10287/proxy/metrics");
        let metrics = fixture.kubectl().run(&["get", "--raw", &path])?;
        let denied = metrics
            .lines()
            .filter(|line| line.starts_with("culvert_certificates_denied_total{"));
        for line in denied {
            let (_, count) = line.rsplit_once(' ').context("no value")?;
            total += count.parse::<u64>()?;
        }
    }
    Ok(total)
}

/// Starts or stops controllers, and waits until that is done.
pub(super) fn scale(fixture: &Fixture<'_>, replicas: u32) -> Result<()> {
    let replicas = format!("--replicas={replicas}");
    let kubectl = fixture.kubectl();
    kubectl.run(&["-n", NAMESPACE, "scale", DEPLOYMENT, &replicas])?;
    kubectl.wait_for_rollout(NAMESPACE, DEPLOYMENT)
}

/// Gives the controllers another section `controller` of their config, and waits until all have it.
pub(super) fn configure(fixture: &Fixture<'_>, name: &str, section: &str) -> Result<()> {
    let kubectl = fixture.kubectl();
    kubectl.apply(&format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: {NAMESPACE}}}\n\
         data:\n  culvert.yaml: |\n    source: {{ kube: {{}} }}\n    controller: {section}\n"
    ))?;
    let patch = format!(
        r#"{{"spec":{{"template":{{"spec":{{"volumes":[{{"name":"config","configMap":{{"name":"{name}"}}}}]}}}}}}}}"#
    );
    kubectl.run(&["-n", NAMESPACE, "patch", DEPLOYMENT, "-p", &patch])?;
    kubectl.wait_for_rollout(NAMESPACE, DEPLOYMENT)
}

/// Asks the controllers for another CA.
pub(super) fn renew_ca(fixture: &Fixture<'_>) -> Result<()> {
    let annotation = "culvert.dev/renew=now";
    let arguments = [
        "-n",
        NAMESPACE,
        "annotate",
        "secret",
        "culvert-ca",
        annotation,
    ];
    fixture.kubectl().run(&arguments).map(drop)
}
