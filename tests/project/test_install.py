"""What `make` gives uv of pip's settings."""

from __future__ import annotations

import install


def test_uv_gets_the_settings_of_pip():
    listed = """:env:.cert='/a b/ca.crt'
global.extra-index-url='file:///one file:///two'
global.find-links='\\n/wheels\\n/more'
global.index-url='https://index.example/simple'
global.disable_pip_version_check='1'"""
    assert install.uv_settings(listed) == {
        "SSL_CERT_FILE": "/a b/ca.crt",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
    }
    assert install.uv_settings("") == {}


def test_pip_installs_where_it_has_a_setting_that_uv_lacks():
    assert install.uv_settings("global.index-url='https://index.example'\nglobal.client-cert='/own.pem'") is None
