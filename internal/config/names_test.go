// SPDX-License-Identifier: Apache-2.0

package config

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestNames(t *testing.T) {
	for text, want := range map[string]string{
		"names: {http: ['127.0.0.1:80', '[::1]:80'], tls: '127.0.0.1:443'}": "",
		"names: {http: 'localhost:80'}":                                     `"localhost:80": want ADDRESS:PORT`,
		"names: {http: ':80'}":                                              "want ADDRESS:PORT",
		"names: {http: '127.0.0.1:0'}":                                      "want ADDRESS:PORT",
		"names: {domain: a_b}":                                              "want a domain",
		"names: {domain: 10.0.0.1}":                                         "want a domain",
		"names: {http: '127.0.0.1:80', tls: '0.0.0.0:80'}":                  `names.tls: "0.0.0.0:80": is at the port of "127.0.0.1:80"`,
		"names: {http: ['127.0.0.1:80', '127.0.0.1:80']}":                   "names.http",
	} {
		_, err := loadText(t, text)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// loadText loads the configuration of a host.
func loadText(t *testing.T, text string) (Host, error) {
	t.Helper()
	return LoadHost(write(t, filepath.Join(t.TempDir(), "host.yaml"), text), nil, lookup(nil))
}
