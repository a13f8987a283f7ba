use std::sync::Arc;

use super::*;
use crate::model::{ConfigMap, ObjectName};

const T1: Duration = Duration::from_secs(1);
const T2: Duration = Duration::from_secs(2);

fn object(name: &str, value: &str) -> Object {
    Object::ConfigMap(Arc::new(ConfigMap {
        name: ObjectName::new("shop", name),
        data: BTreeMap::from([("value".to_owned(), value.to_owned())]),
    }))
}

fn words(news: &News) -> Vec<(String, bool)> {
    let changes = news.changes.iter();
    changes
        .map(|(id, object)| (id.to_string(), object.is_some()))
        .collect()
}

#[test]
fn news_tell_each_changed_object_once_and_when_the_first_change_was_noticed() {
    let mut layer = Layer::default();
    layer.apply(object("b", "1"), T1);
    layer.take_news().expect("news");
    layer.apply(object("a", "1"), T2);
    layer.apply(object("a", "2"), T1);
    layer.remove(&object("b", "1").id(), T2);

    let news = layer.take_news().expect("news");

    assert_eq!(news.since, T1);
    assert_eq!(
        words(&news),
        [
            ("ConfigMap shop/a".to_owned(), true),
            ("ConfigMap shop/b".to_owned(), false)
        ]
    );
    assert_eq!(layer.counts()[&Kind::ConfigMap], 1);
}

#[test]
fn the_first_news_tell_what_is_there() {
    let mut layer = Layer::default();
    layer.apply(object("a", "1"), T2);
    layer.apply(object("b", "1"), T1);
    layer.remove(&object("b", "1").id(), T2);

    let news = layer.take_news().expect("news");

    assert_eq!(news.since, T1);
    assert_eq!(words(&news), [("ConfigMap shop/a".to_owned(), true)]);
    assert!(layer.take_news().is_none());
}

#[test]
fn what_says_nothing_new_is_no_news() {
    let mut layer = Layer::default();
    layer.apply(object("a", "1"), T1);
    layer.take_news().expect("news");

    layer.apply(object("a", "1"), T2);
    layer.remove(&object("b", "1").id(), T2);

    assert!(layer.take_news().is_none());
}
