// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/guest/source/kube/object"
	"github.com/fairlead/fairlead/internal/port"
)

// A Service and an EndpointSlice of any API server: what they declare has an address and a
// port, and one origin each.
func FuzzService(f *testing.F) {
	f.Add([]byte(`{"metadata":{"namespace":"default","name":"web","labels":{"app":"web"}},"spec":{"type":"NodePort","clusterIP":"10.96.0.9","ipFamilies":["IPv4","IPv6"],"ports":[{"name":"http","port":80,"nodePort":30080,"targetPort":8080}]}}`),
		[]byte(`{"metadata":{"name":"web-1","labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv4","ports":[{"name":"http","port":8080}],"endpoints":[{"addresses":["10.42.0.5"],"conditions":{"ready":true},"targetRef":{"kind":"Pod","namespace":"default","name":"web-0"}}]}`))
	f.Add([]byte(`{"spec":{"type":"LoadBalancer","externalIPs":["192.0.2.7","::ffff:1.2.3.4","x"],"loadBalancerSourceRanges":["10.0.0.0/8"],"ports":[{"protocol":"SCTP","port":1},{"port":0},{"port":70000}]},"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.8"},{"hostname":"h"}]}}}`), []byte(`{}`))
	f.Fuzz(func(t *testing.T, b, sliceJSON []byte) {
		var o object.Service
		var slice object.EndpointSlice
		if json.Unmarshal(b, &o) != nil || json.Unmarshal(sliceJSON, &slice) != nil {
			return
		}
		bindings, _ := compact(&o).declare("", []endpoints{compactSlice(&slice)}, true)
		seen := map[port.Origin]bool{}
		for _, b := range bindings {
			if !b.Address.IsValid() || b.Address.Is4In6() || b.Port == 0 || seen[b.Origin] {
				t.Errorf("%+v", b)
			}
			for _, d := range b.Dial {
				if !d.IsValid() || d.Port() == 0 {
					t.Errorf("%s is dialled at %s", b.Key, d)
				}
			}
			seen[b.Origin] = true
		}
	})
}

// FuzzKubeconfig reads no file but those of a directory of its own. What is left of a
// kubeconfig that is taken names no file any more.
func FuzzKubeconfig(f *testing.F) {
	const head = "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n"
	f.Add([]byte(head + "clusters: [{name: k, cluster: {server: 'https://127.0.0.1:6443', certificate-authority: ca}}]\nusers: [{name: u, user: {tokenFile: token}}]\n"))
	f.Add([]byte(head + "clusters: [{name: k, cluster: {server: 'http://127.0.0.1', certificate-authority-data: eA==}}]\nusers: [{name: u, user: {client-certificate: ca, client-key: missing}}]\n"))
	f.Add([]byte(head + "users: [{name: u, user: {exec: {command: /nowhere, apiVersion: client.authentication.k8s.io/v1}}}]\n"))
	f.Add([]byte("contexts: {}\n"))
	dir := f.TempDir()
	for _, name := range []string{"ca", "token"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x\n"), 0o600); err != nil {
			f.Fatal(err)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := clientcmd.Load(b)
		if err != nil {
			return
		}
		here := func(name *string) {
			if *name != "" {
				*name = filepath.Join(dir, filepath.Base(*name))
			}
		}
		for _, c := range file.Clusters {
			here(&c.CertificateAuthority)
		}
		for _, u := range file.AuthInfos {
			here(&u.ClientCertificate)
			here(&u.ClientKey)
			here(&u.TokenFile)
		}
		if _, err := embed(file, file.CurrentContext); err != nil || file.Contexts[file.CurrentContext] == nil {
			return
		}
		context := file.Contexts[file.CurrentContext]
		if c := file.Clusters[context.Cluster]; c != nil && c.CertificateAuthority != "" {
			t.Errorf("%q names %s", b, c.CertificateAuthority)
		}
		if u := file.AuthInfos[context.AuthInfo]; u != nil && u.ClientCertificate+u.ClientKey+u.TokenFile != "" {
			t.Errorf("%q names files", b)
		}
	})
}
