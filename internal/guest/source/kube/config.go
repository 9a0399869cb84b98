// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/fairlead/fairlead/internal/config/trust"
	"github.com/fairlead/fairlead/internal/guest/registry"
	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/guest/source/kube/object"
)

// config is how to reach the server, and where that is written.
type config struct {
	origin string // human-readable
	sum    []byte // of everything that was read
	rest   *rest.Config
}

// is reports whether two configurations were read from the same place, with the same content.
func (c config) is(other config) bool {
	return c.origin == other.origin && bytes.Equal(c.sum, other.sum)
}

// port is the server's, 0 if none is written.
func (c config) port() uint16 {
	host := c.rest.Host
	if !strings.Contains(host, "://") {
		host = "https://" + host
	}
	u, err := url.Parse(host)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil {
		return 0
	}
	return uint16(n)
}

// load reads the configuration that holds now.
func (s *Source) load() (config, error) {
	var c config
	var err error
	if s.inCluster {
		c.origin = "the service account"
		c.rest, err = rest.InClusterConfig()
	} else {
		c, err = s.loadFile()
	}
	if err != nil {
		return config{}, fmt.Errorf("%s: %w", c.origin, err)
	}
	// Read now, so that no transport watches files for ever: the next session
	// reads them again.
	if err := rest.LoadTLSFiles(c.rest); err != nil {
		return config{}, fmt.Errorf("%s: %w", c.origin, err)
	}
	c.rest.CAFile, c.rest.CertFile, c.rest.KeyFile = "", "", ""
	if err := unexpired(c.rest.CertData); err != nil {
		return config{}, fmt.Errorf("%s: %w", c.origin, err)
	}
	sum := sha256.New()
	for _, b := range [][]byte{c.sum, c.rest.CAData, c.rest.CertData, c.rest.KeyData} {
		_, _ = sum.Write(b)
	}
	c.sum = sum.Sum(nil)
	c.rest.UserAgent = "fairlead"
	c.rest.WarningHandler = rest.NoWarnings{}
	c.rest.ContentType = runtime.ContentTypeProtobuf
	c.rest.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	return c, nil
}

// errNoContext is in the error of a kubeconfig without the context that is configured.
var errNoContext = errors.New("the context does not exist")

// missing reports whether reading a kubeconfig failed because there is none.
func missing(c config, err error) bool { return c.sum == nil && errors.Is(err, os.ErrNotExist) }

// loadFile reads the first kubeconfig that exists, may be used and is no other source's to
// follow: the one that was read before, if that is so. Without one, the error is an
// [engine.ErrAbsent], or an [engine.ErrRefused] unless a server was listed.
func (s *Source) loadFile() (config, error) {
	var none, unusable, other []error
	paths := s.o.Kubeconfigs
	if own := s.clusters.path(s); own != "" {
		paths = unique(append([]string{own}, paths...))
	}
	for _, path := range paths {
		c, err := s.readFile(path)
		var by string
		switch {
		case err != nil && missing(c, err):
			none = append(none, err)
			continue
		case errors.Is(err, errNoContext):
			other = append(other, fmt.Errorf("%s: %w", c.origin, err))
			continue
		case errors.Is(err, trust.ErrUntrusted), errors.Is(err, os.ErrPermission):
			if by = s.clusters.takenBy(s, claim{path: path}); by == "" {
				unusable = append(unusable, fmt.Errorf("%s: %w", c.origin, err))
				continue
			}
		default:
			if by = s.clusters.take(s, claim{path, c.server()}); by == "" {
				return c, err
			}
		}
		none = append(none, fmt.Errorf("%s: the source %s follows it", c.origin, by))
	}
	err := errors.Join(unusable...)
	if err != nil {
		err = unusableError{err}
	}
	switch {
	case err != nil && s.listed.Load():
	case err != nil && s.Optional(): // another cluster is followed, and nothing waits for this one
		err = fmt.Errorf("%w: %w", engine.ErrAbsent, err)
	case err != nil:
		err = engine.Refused(err)
	case s.Optional():
		return config{origin: "no kubeconfig"}, fmt.Errorf("%w: %w: %w", engine.ErrAbsent, engine.ErrUnused, errors.Join(append(none, other...)...))
	case len(other) > 0:
		return config{origin: "no kubeconfig has the context"}, errors.Join(other...)
	default:
		return config{origin: "no kubeconfig"}, fmt.Errorf("%w: %w", engine.ErrAbsent, errors.Join(none...))
	}
	return config{origin: "no usable kubeconfig"}, err
}

// unusableError is a [registry.ErrUnusable] with its own text.
type unusableError struct{ error }

func (e unusableError) Is(target error) bool { return target == registry.ErrUnusable }
func (e unusableError) Unwrap() error        { return e.error }

// readFile reads a kubeconfig. One that another user can change is refused: it can name
// programs, which would run as ours, and files. The sum is nil if it was not read.
func (s *Source) readFile(path string) (config, error) {
	c := config{origin: "kubeconfig " + path}
	b, err := trust.ReadFile(path, maxKubeconfig)
	if err != nil {
		return c, err
	}
	c.sum = b
	file, err := clientcmd.Load(b)
	if err != nil {
		return c, err
	}
	if name := s.o.Context; name != "" && file.Contexts[name] == nil {
		return c, fmt.Errorf("context %q: %w", name, errNoContext)
	}
	// Files are named from where the kubeconfig is.
	for _, cluster := range file.Clusters {
		cluster.LocationOfOrigin = path
	}
	for _, user := range file.AuthInfos {
		user.LocationOfOrigin = path
	}
	if err := clientcmd.ResolveLocalPaths(file); err != nil {
		return c, err
	}
	tokenFile, err := embed(file, cmp.Or(s.o.Context, file.CurrentContext))
	if err != nil {
		return c, err
	}
	c.rest, err = clientcmd.NewNonInteractiveClientConfig(*file, s.o.Context,
		&clientcmd.ConfigOverrides{ClusterDefaults: clientcmdapi.Cluster{}}, nil).ClientConfig()
	if err == nil && tokenFile != "" && rest.IsConfigTransportTLS(*c.rest) { // never in plain text
		withToken(c.rest, tokenFile)
	}
	return c, err
}

// unexpired names a client certificate that no server will take any more.
func unexpired(cert []byte) error {
	block, _ := pem.Decode(cert)
	if block == nil {
		return nil // none, or one that the transport complains about
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return fmt.Errorf("client certificate: %w", err)
	}
	if time.Now().After(c.NotAfter) {
		return fmt.Errorf("the client certificate of %q expired on %s", c.Subject.CommonName, c.NotAfter.Format(time.DateOnly))
	}
	return nil
}

// clientFor makes a client that knows two kinds of objects and speaks protobuf.
func clientFor(conf *rest.Config, hc *http.Client, gv schema.GroupVersion, apiPath string) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	object.Register(scheme)
	c := rest.CopyConfig(conf)
	c.GroupVersion, c.APIPath = &gv, apiPath
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientForConfigAndClient(c, hc)
}
